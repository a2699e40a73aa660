"""How long a test waits for what must happen: a bound for busy machines, never a measurement."""

PATIENCE_S = 300.0
