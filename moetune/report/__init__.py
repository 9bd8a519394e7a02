"""Figures of everything measured and planned, and the HTML around them.

Figures are plotly's JSON, drawn by the plotly.js of the installed `plotly` package, which is read
only here. Functions take values of the domain and return a `Figure`.
"""
