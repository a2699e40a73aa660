"""The ground floor: configuration, errors, environment, units. Imports no torch."""
