"""PJRT through jaxlib: the only package that touches jaxlib's private API."""
