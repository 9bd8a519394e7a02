"""What MPipeMoE (Zhang et al., 2023) reports, measured here."""
