"""Files that start a training run, as they are read: nothing of them is run."""
