"""How a fluxq checkpoint loads where users already work."""
