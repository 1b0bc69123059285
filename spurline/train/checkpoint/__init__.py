"""Checkpoints of a run: written, verified and loaded by all of its ranks together.

manager.py          saves and loads the checkpoints of a run
folder.py           the folder they are in; record.py: checkpoint.json in each of them; signature.py: who wrote it
state.py            tensors of model and optimizer; random_state.py: random number generators
staging.py          copies in host memory, to write in the background
finite.py           whether tensors are finite
writer.py           files with checksums; reader.py: tensors from them; layout.py: where each tensor is
version1.py         checkpoints of earlier versions; plain_pickle.py: their pickles, without running them
compatibility.py    whether a checkpoint fits a model
contents.py         what is in a checkpoint, for people to inspect
ranks.py            the ranks of a run: an error on one of them is raised on all
"""
