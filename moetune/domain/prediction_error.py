"""The one definition of a prediction's error."""


def prediction_error(predicted: float, measured: float) -> float:
    """Return predicted / measured − 1, below 0 for what took longer than predicted.

    0 where nothing was measured: a step of no time has no error.
    """
    return predicted / measured - 1 if measured else 0.0
