"""How is a model served over HTTP? Configuration to a Ray Serve application."""
