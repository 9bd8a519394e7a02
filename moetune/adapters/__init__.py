"""Models of other libraries with moetune's expert layers: see `moetune.adapt`."""
