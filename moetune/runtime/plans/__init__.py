"""Plans inside a training job: the plan book, online search, the plan service."""
