"""Repairs: single changes of a program's collectives and operations, tried on a failed case to find out what is wrong."""
