"""Clients on real machines: Flower carries the messages, and nothing else imports it."""
