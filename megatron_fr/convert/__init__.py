"""Offline tools for model folders: conversion, inspection, quantisation."""
