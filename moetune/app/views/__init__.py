"""Views: plans, profiles and comparisons as neutral `Section`s.

The command line draws them with rich, the pages and the report with Jinja.
"""
