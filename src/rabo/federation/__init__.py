"""The loop of the server: clients, rounds, ledger and warnings."""
