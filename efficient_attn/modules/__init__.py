"""Modules with parameters or buffers that several backends share."""
