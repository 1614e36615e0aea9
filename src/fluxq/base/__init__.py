FLUXQ_VERSION = "0.1.0"  # of this code: the metadata that Python finds may be another installation's
