"""HTTP service for a team: the command line's answers over one shared store.

A request passes `middleware`, is answered by `plans`, `profiles` or `pages` through the threads of
`workers`, and every error becomes a document of `problems`.
"""
