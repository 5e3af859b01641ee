"""Bridges to other libraries; each module imports its library only where it is used."""
