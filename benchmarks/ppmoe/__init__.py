"""PPMoE's own figures: a profile made of them, and its Table 2 beside our predictions."""
