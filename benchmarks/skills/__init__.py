"""Questions that coding agents answer with moetune, with its skills and without: their score."""
