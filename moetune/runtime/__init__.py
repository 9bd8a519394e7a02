"""Inside the training job: the layer, its links and its plans. Imports no store and no CLI."""
