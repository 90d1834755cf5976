"""Jobs and attempts: their states, the use cases that change them, and how they are shown."""
