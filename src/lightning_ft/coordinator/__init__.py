"""The coordinator's server and the clients of members and agents. Sockets and time, but no torch."""
