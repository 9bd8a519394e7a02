"""Neutral sections, figures of profiles and plans, and the HTML around them.

A figure has panels of marks, which `svg.py` draws. Functions take values of the domain and return
a `Figure`.
"""
