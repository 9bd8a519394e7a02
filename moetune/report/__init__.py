"""Neutral sections, figures of profiles and plans, the HTML around them, and a layer's reasons.

A figure has panels of marks, which `svg.py` draws. Functions take values of the domain and return
a `Figure`.
"""
