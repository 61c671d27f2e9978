"""States through a transform: inputs, staging, effects, wrappers, signatures, rules, carries."""
