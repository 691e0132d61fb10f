"""Descriptions of machines and networks that other tools write, one format a module."""
