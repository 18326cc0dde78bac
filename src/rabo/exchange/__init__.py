"""Messages between the server and its clients: state, work, means and costs."""
