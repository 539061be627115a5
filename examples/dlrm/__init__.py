"""DLRM on Criteo click logs, trained against parameter servers: as a user writes it, and as fxlib hands it back."""
