"""torchtitan's own trainer on two CPU ranks, with its exchange and with moetune's."""
