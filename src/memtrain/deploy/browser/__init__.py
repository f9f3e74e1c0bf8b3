"""One HTML file that runs a trained network in a browser, without a server or a network."""
