"""Layers and models of released libraries as subjects, one file a library, imported only when one of its subjects is asked for."""
