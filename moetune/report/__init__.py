"""Neutral sections, figures of profiles and plans, and the HTML around them.

A figure is plotly's JSON, written without plotly's slow import and drawn by the plotly.js of the
installed package. Functions take values of the domain and return a `Figure`.
"""
