"""Jobs and attempts: their states, their rows, and what can be done to them."""
