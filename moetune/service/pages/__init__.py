"""The service's web pages: plans, machines, profiles and models."""
