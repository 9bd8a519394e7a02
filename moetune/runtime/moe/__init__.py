"""The MoE layers: gate, dispatch, experts, and the executor of their plan."""
