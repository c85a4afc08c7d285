"""A classifier that keeps learning: learn classes from folders of photos, learn more later, predict, evaluate, export.

`Classifier` is the Python interface (also `incvec.Classifier`). `folder.py`: the model folder and its transactions;
`photos.py`: photos in and out; `settings.py`: what is chosen once; `learning.py`: one `learn`; `training.py`: its
training as a run of the engine; `adoption.py`, `past.py`: a network trained elsewhere; `network.py`: the deployed
network; `evaluation.py`, `export.py`: what is done with it.
"""

from incvec.classifier.model import Classifier

__all__ = ["Classifier"]
