"""How the processes of a job are started, watched and ended."""
