"""The campaign of injected faults: scenarios, what must hold after each, and the runner that repeats them."""
