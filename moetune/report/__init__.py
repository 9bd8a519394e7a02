"""Neutral sections, figures of profiles and plans, and the HTML around them.

A figure is JSON in plotly's form, which `svg.py` draws. Functions take values of the domain and
return a `Figure`.
"""
