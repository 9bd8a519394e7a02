"""Searches as Optuna studies: on a running layer, and of layouts. Only this package imports it."""

from moetune.search.layouts import LayoutStudy
from moetune.search.study import TuningStudy

__all__ = ["LayoutStudy", "TuningStudy"]
