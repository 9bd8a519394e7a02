"""Inside the training job: layers, plan books, sharded models. Imports no store and no CLI."""
