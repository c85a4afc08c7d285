from dataclasses import dataclass
from pathlib import Path
@dataclass
class Selection: pass
@dataclass
class SlurmJob: pass
def script(*a): pass
def submit_script(*a): pass
