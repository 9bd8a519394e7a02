"""The service's web pages: plans, machines, profiles, observations, what-if and comparison."""
