"""What Flower runs: on the server, and on every node."""

from pathlib import Path

from rabo.flower.app import client_app, server_app

FOLDER = Path(__file__).parent
server = server_app(FOLDER)
client = client_app(FOLDER)
