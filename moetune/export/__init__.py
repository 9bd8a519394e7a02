"""Exports of a training plan: what each runtime reads, written for one stated version of it."""
