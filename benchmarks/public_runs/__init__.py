"""Training runs that others published, planned and compared: ranking, signs, times, memory."""
