"""The service's web pages: plans, machines, profiles, observations and what-if."""
