"""How the stages of a job are executed: on Ray Data, or where a test says."""
