"""The former name of `incvec.study.geometry`."""

raise ImportError("incvec.lab is now incvec.study.geometry: `from incvec.study.geometry import barrier, path, plane`.")
