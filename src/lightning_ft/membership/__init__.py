"""The pure membership core: views, parking, quorum. No clock, socket, thread, random number, log or torch."""
