"""The network lab: ranks in namespaces of their own, joined by links of a set rate."""
