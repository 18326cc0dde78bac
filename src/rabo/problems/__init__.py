"""The bilevel problem of one client: losses, parameters and data."""
